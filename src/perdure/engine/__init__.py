"""The engine: the loop on its thread, futures and streams around it, text at its edge.

`llm.LLM` and `async_llm.AsyncLLM` are its faces; both own an `engine.Engine`.
"""
