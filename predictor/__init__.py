"""The domain of Headway: values in, values out.

Nothing here reads a clock, opens a socket, awaits, or draws randomness of its own: time and generators are arguments.
"""
