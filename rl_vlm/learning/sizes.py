"""Sizes by which the learner allocates, without torch: the memory plan reads them, too."""

# Logits that exist at once, positions × vocabulary entries: a CPU's tile stays in its caches, a GPU's fills the card.
HEAD_TILES = {"cpu": (512, 2048), "cuda": (4096, 16_384)}
