"""The cost model: work of documents, attention, and the exchange of K and V."""
