"""`perdure bench serve`: how fast a server answers, ours or any that speaks OpenAI's interface.

`traffic` says what is asked and when, `sending` asks it and takes the times, `report` makes numbers of them.
"""
