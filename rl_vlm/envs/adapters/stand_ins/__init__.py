"""The few lines of other frameworks that environment files import, for machines where those are not installed."""
