"""Decisions. Takes commands, returns plans, is told what came of them; holds no tensor, thread, clock or socket.

`scheduler.Scheduler` is the only entry. Everything here runs on the engine loop's thread, and every random choice is
made elsewhere: the same inputs in the same order give the same plans, bit for bit.
"""
