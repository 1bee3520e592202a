"""`python -m jaxllm.plan`: what a model needs on a GPU that need not be there, from the compiled steps themselves."""
