"""Code for a CUDA device that is not there: Inductor and Triton need one to load and run what they make, no more."""
