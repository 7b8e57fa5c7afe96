"""What the service keeps: tables, migrations, and files named by their content."""
