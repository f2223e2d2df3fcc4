"""Measuring a draft: the evaluator process and the functions behind `splitserve eval`."""
