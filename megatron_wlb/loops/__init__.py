"""Loops of others whose batches `plan.closed` divides: a file for each loop, whose `balanced(job)` is the one call.

A call replaces the loop's own function in this process, after a check of its parameters, and returns a context
manager: `close()`, or the end of a `with`, takes it back.
"""
