"""The preference loop without Ray's driver: control agent, replay buffer, reward ensemble, selection of pairs,
schedule."""
