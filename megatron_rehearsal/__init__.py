"""Rehearsals: ranks of a real GPU job, run on a machine without a GPU over a stand-in for CUDA and NCCL."""
