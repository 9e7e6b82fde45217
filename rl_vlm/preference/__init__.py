"""The preference loop without Ray's driver: control agent, replay buffer, reward ensemble, pairs, schedule."""
