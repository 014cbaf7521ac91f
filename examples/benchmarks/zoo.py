"""The rows of sweep.py: a model, its optimizers, its data. Small, with random weights; each row imports its package."""

import torch
import torch.nn.functional as F
from torch import nn


def nothing() -> None:
    """After an update: nothing."""


def supervised(net, optimizer_of, data, loss_of=lambda net, *batch: net(*batch)):
    """A model, its phases, and its data: one optimizer, one loss."""

    def make(net):
        trained = [p for p in net.parameters() if p.requires_grad]
        return [(lambda *batch: loss_of(net, *batch), optimizer_of(trained), nothing)]

    return net.train(), make, data


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def mlp(optimizer_of):
    """The model of the optimizers' rows."""

    def build():
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        batch = lambda: (torch.randn(4, 8), torch.randn(4, 4))  # noqa: E731
        return supervised(net, optimizer_of, batch, lambda net, x, y: F.mse_loss(net(x), y))

    return build


def sparse_adam():
    """Its gradients are sparse: an embedding's."""
    net = nn.Embedding(16, 4, sparse=True)
    data = lambda: (torch.randint(0, 16, (4, 3)), torch.randn(4, 4))  # noqa: E731
    return supervised(
        net, torch.optim.SparseAdam, data, lambda net, x, y: F.mse_loss(net(x).mean(1), y)
    )


def of_torch(name, **options):
    return mlp(lambda parameters: getattr(torch.optim, name)(parameters, **options))


def imported(module, name, **options):
    """An optimizer of another package, imported where its row is tried."""

    def build():
        cls = getattr(__import__(module, fromlist=[name]), name)

        def make(parameters):
            optimizer = cls(parameters, **options)
            if hasattr(optimizer, "train"):
                optimizer.train()
            return optimizer

        return mlp(make)()

    return build


def muon(parameters):
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01)


def llama(use_dora):
    def build():
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "vocab_size": 64,
        }
        net = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))
        net = get_peft_model(
            net, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=use_dora)
        )
        return supervised(
            net,
            sgd,
            lambda: (torch.randint(0, 64, (2, 8)),),
            lambda net, ids: net(input_ids=ids, labels=ids).loss,
        )

    return build


def timm_model(name, ema=False, **sizes):
    def build():
        import timm
        from timm.utils import ModelEmaV3

        inner = timm.create_model(name, num_classes=4, **sizes)
        net = nn.ModuleList([inner, ModelEmaV3(inner, decay=0.9).module] if ema else [inner])

        def make(net):
            after = nothing
            if ema:
                average = ModelEmaV3(net[0], decay=0.9)
                average.module = net[1]
                after = lambda: average.update(net[0])  # noqa: E731
            loss_of = lambda x, y: F.cross_entropy(net[0](x), y)  # noqa: E731
            return [(loss_of, torch.optim.AdamW(net[0].parameters(), lr=1e-3), after)]

        net[0].train()
        return net, make, lambda: (torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2,)))

    return build


def unet():
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )

    def data():
        return torch.randn(2, 3, 16, 16), torch.randint(0, 99, (2,)), torch.randn(2, 3, 16, 16)

    return supervised(net, sgd, data, lambda net, x, t, noise: F.mse_loss(net(x, t).sample, noise))


def whisper(layer_drop=0.0):
    def build():
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 32}
        sizes = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64, "num_mel_bins": 8}
        places = {"max_source_positions": 16, "max_target_positions": 16, "encoder_layers": 2}
        tokens = {
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        }
        rest = {"decoder_layers": 1, "dropout": 0.0, "encoder_layerdrop": layer_drop}
        config = WhisperConfig(**heads, **sizes, **places, **tokens, **rest)
        return supervised(
            WhisperForConditionalGeneration(config),
            sgd,
            lambda: (torch.randn(2, 8, 32), torch.randint(3, 64, (2, 6))),
            lambda net, x, y: net(input_features=x, labels=y).loss,
        )

    return build


def wav2vec2():
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    ears = {
        "conv_dim": (16, 16),
        "conv_stride": (5, 4),
        "conv_kernel": (10, 8),
        "num_feat_extract_layers": 2,
    }
    places = {
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
        "apply_spec_augment": False,
    }
    still = dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0
    )
    net = Wav2Vec2Model(Wav2Vec2Config(layerdrop=0.5, **sizes, **ears, **places, **still))
    net.freeze_feature_encoder()
    return supervised(
        net,
        sgd,
        lambda: (torch.randn(2, 800),),
        lambda net, x: net(x).last_hidden_state.square().mean(),
    )


def gan():
    """DCGAN's pair: each has an optimizer, and both steps are in one."""
    maker = nn.Sequential(
        nn.ConvTranspose2d(8, 8, 4, bias=False),  # as ahead of every batch norm
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1),
    )
    critic = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1)
    )

    def make(net):
        maker, critic = net
        adam = lambda part: torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999))  # noqa: E731

        def of_critic(real, noise):
            return (
                F.softplus(-critic(real)).mean() + F.softplus(critic(maker(noise).detach())).mean()
            )

        def of_maker(real, noise):
            return F.softplus(-critic(maker(noise))).mean()

        return [(of_critic, adam(critic), nothing), (of_maker, adam(maker), nothing)]

    return (
        nn.ModuleList([maker, critic]),
        make,
        lambda: (torch.randn(4, 1, 8, 8), torch.randn(4, 8, 1, 1)),
    )


def ppo():
    """The clipped objective of an actor and a critic with one trunk."""
    net = nn.ModuleDict(
        {"trunk": nn.Linear(4, 16), "actor": nn.Linear(16, 2), "critic": nn.Linear(16, 1)}
    )

    def loss_of(net, state, action, before, gain, value):
        h = torch.tanh(net["trunk"](state))
        policy = torch.distributions.Categorical(logits=net["actor"](h))
        ratio = (policy.log_prob(action) - before).exp()
        clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return F.mse_loss(net["critic"](h)[:, 0], value) - clipped - 0.01 * policy.entropy().mean()

    def data():
        return (
            torch.randn(8, 4),
            torch.randint(0, 2, (8,)),
            -torch.rand(8),
            torch.randn(8),
            torch.randn(8),
        )

    return supervised(net, sgd, data, loss_of)


ROWS = {
    "DCGAN": gan,
    "PPO": ppo,
    "SGD": of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam, amsgrad": of_torch("Adam", amsgrad=True),
    "AdamW": of_torch("AdamW"),
    "AdamW, fused": of_torch("AdamW", fused=True),
    "AdamW, foreach, maximize": of_torch("AdamW", foreach=True, maximize=True),
    "NAdam": of_torch("NAdam"),
    "RAdam": of_torch("RAdam"),
    "Adamax": of_torch("Adamax"),
    "Adadelta": of_torch("Adadelta"),
    "Adagrad": of_torch("Adagrad"),
    "Adafactor": of_torch("Adafactor"),
    "RMSprop, centered, momentum": of_torch("RMSprop", centered=True, momentum=0.9),
    "Rprop": of_torch("Rprop"),
    "ASGD": of_torch("ASGD"),
    "SparseAdam": sparse_adam,
    "LBFGS": of_torch("LBFGS"),
    "Muon": mlp(muon),
    "torchao: AdamW8bit": imported("torchao.optim", "AdamW8bit"),
    "torchao: AdamW4bit": imported("torchao.optim", "AdamW4bit"),
    "torchao: AdamWFp8": imported("torchao.optim", "AdamWFp8"),
    "schedulefree: AdamWScheduleFree": imported("schedulefree", "AdamWScheduleFree"),
    "lion-pytorch: Lion": imported("lion_pytorch", "Lion", lr=1e-3),
    "prodigyopt: Prodigy": imported("prodigyopt", "Prodigy"),
    "pytorch-optimizer: SOAP": imported("pytorch_optimizer", "SOAP"),
    "pytorch-optimizer: Shampoo": imported("pytorch_optimizer", "Shampoo"),
    "PEFT: LoRA": llama(use_dora=False),
    "PEFT: DoRA": llama(use_dora=True),
    "wav2vec2 with layer drop": wav2vec2,
    "Whisper": whisper(),
    "Whisper with layer drop": whisper(0.5),
    "timm: ViT with its EMA": timm_model(
        "vit_tiny_patch16_224", ema=True, img_size=32, depth=2, embed_dim=32, num_heads=2
    ),
    "timm: ConvNeXt": timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)),
    "diffusers: UNet": unet,
}
