"""The processes of a run: how they start, agree, watch one another, stop and end.

What a process needs before torch is imported (`ranks`, `signals`, `banner`) does not import it.
"""
