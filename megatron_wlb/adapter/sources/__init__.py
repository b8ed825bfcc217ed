"""Sources of data, a file each, with a `source.Source`. `datasets` builds the one that flags ask for."""
