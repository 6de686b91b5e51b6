"""What changes hosts: reads state, yields only what is needed."""
