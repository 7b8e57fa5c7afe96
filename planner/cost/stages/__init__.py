"""Price the stages of a step: one file per stage of `runtime.stages`."""
