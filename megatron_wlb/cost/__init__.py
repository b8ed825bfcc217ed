"""The cost model: work of documents, attention kernels, and the exchange of K and V."""
