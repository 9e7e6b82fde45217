"""What is learned from groups: advantage estimators, losses, plans, packed batches, the update, strategies of learner
groups."""
