"""The processes of a run: how they start, agree, watch one another, stop and end.

May import `runs`, `data`, `recipe` and `estimate`; imported by the command line, `training`,
`sweep` and `bench`. What a process needs before torch is imported (`ranks`, `signals`, `banner`)
does not import it.
"""
