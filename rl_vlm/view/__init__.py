"""The page of a run: `rl-vlm view` and `rl-vlm report`. Its front end is in viewer/."""
