"""What crosses: one struct a body, in OpenAI's words and, for what OpenAI has not, in vLLM's."""
