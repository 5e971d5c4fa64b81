"""What people see: tables of passes, checks and stages."""
