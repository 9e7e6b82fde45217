"""GridWalk-v0: walk to the goal on a drawn grid."""
