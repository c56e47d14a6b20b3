"""Methods under one protocol: the cells of a table, run one by one, and the table from their folders."""
