"""What is in C++, in plain Python: the tests compare the two to the bit."""
