"""Methods that choose the widths of a network, one file each: all take a Problem and give a Choice."""
