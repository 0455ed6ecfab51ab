"""The epsilon of a ViT config is not read by KerasHub's converter."""

import os

os.environ["KERAS_BACKEND"] = "jax"
from inspect import signature

import keras_hub
from keras_hub.src.utils.transformers.convert_vit import convert_backbone_config
from transformers import ViTConfig

config = ViTConfig()
read = convert_backbone_config(config.to_dict())
default = signature(keras_hub.models.ViTBackbone).parameters["layer_norm_epsilon"].default
print("layer_norm_eps:", config.layer_norm_eps, "read:", read.get("layer_norm_epsilon"))
print("used:", default)
