"""HTTP in front of the served model: OpenAI's interface, `/generate`, limits, metrics. Only `backend.py` knows Ray."""
