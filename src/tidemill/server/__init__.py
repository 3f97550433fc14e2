"""The HTTP room: OpenAI's JSON on the outside, the engine's native types on the inside.

Everything that is JSON, SSE, a status code or a header stops here; nothing here knows tensors, models or scheduling.
"""
