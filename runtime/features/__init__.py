"""Feature stores: rows by node id, from memories, disks and other ranks."""
