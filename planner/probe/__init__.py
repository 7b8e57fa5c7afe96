"""Hardware -> MachineModel."""
