"""What routes and pages call: every act of the service as a function, without HTTP."""
