"""Records a run: metrics, trajectories, terminal output."""
