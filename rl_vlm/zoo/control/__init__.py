"""Control-v0: a policy that sees frames steers a control environment with words."""
