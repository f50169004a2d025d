"""HTTP in front of an engine: OpenAI's interface, and control verbs behind a key of their own. No tensors, public names
only.

- `app.py` is the table of all endpoints, `protocol` what they take and give, `serve.py` the program around them.
- A request to an endpoint becomes requests of the engine (`batch.py`); who goes away, or is cancelled, aborts them.
- Whatever is refused is refused with field, value and limit, and nobody else notices.
"""
