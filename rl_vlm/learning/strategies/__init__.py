"""How the learners of a group share one optimiser step: one file per strategy."""
