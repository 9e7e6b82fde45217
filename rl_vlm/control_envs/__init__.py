"""Control environments that the preference loop steps: observations, actions and pictures."""
