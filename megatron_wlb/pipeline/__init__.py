"""The 1F1B schedule, plain and interleaved: order and times of passes."""
