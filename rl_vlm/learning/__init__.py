"""Updates: advantage estimators, losses, plans, packed batches, optimiser steps of learner groups."""
