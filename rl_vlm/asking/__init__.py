"""Questions to a model: the served one, an engine in this process, or an endpoint by HTTP."""
