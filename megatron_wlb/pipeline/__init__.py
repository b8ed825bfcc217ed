"""The 1F1B schedule, plain and interleaved: what a stage runs in which order, and when."""
