"""Sources of data, a file each: what a `source.Source` tells. `datasets` builds the one that flags ask for."""
