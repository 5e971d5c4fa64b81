"""The folder that an app deploys: model, manifest, tokenizer, configuration."""
