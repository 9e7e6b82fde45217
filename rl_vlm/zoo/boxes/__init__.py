"""An agent that opens boxes, one of which holds a card."""
