"""The cost model: what documents, kernels, collectives, passes and activations cost a job."""
