"""What a run records while it goes on: metrics, trajectories, the terminal."""
