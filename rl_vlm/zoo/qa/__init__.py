"""Questions about images from data of the user's own."""
