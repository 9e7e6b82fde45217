"""Ray Serve: the VLM deployment, the adapter registry and the client."""
