"""The models of the zoo: how each is built, at which resolution it is run, and what the tracing study measured on it.

The three full detectors of that table are left out: they choose boxes by value, so they have no numeric check.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

import timm
import torchvision
from torch import Tensor, nn
from torchvision.models import get_model


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    name: str  # family:model
    px: int  # height and width of the input
    spaces: int  # prunable spaces after replay, in the tracing study, section 10; LayerNorm makes none unprunable there
    share: int  # prunable share of the MACs in percent, from the column "prunable MAC %" of the same table
    params: int  # parameters, unpruned

    @property
    def family(self) -> str:
        """tv (torchvision classifiers), seg (its segmentation nets), detbody (bodies of its detectors) or timm."""
        return self.name.partition(":")[0]

    def build(self) -> nn.Module:
        """A freshly initialised model; nothing is downloaded."""
        key = self.name.partition(":")[2]
        if self.family == "timm":
            return timm.create_model(key, pretrained=False)
        if self.family == "detbody":
            return DetectorBody(get_model(key, weights=None, weights_backbone=None))
        if self.family == "seg":
            return get_model(key, weights=None, weights_backbone=None)
        # these two warn about a slow initialisation that the check replaces anyway
        slow = {"init_weights": False} if key in ("googlenet", "inception_v3") else {}
        return get_model(key, weights=None, **slow)


class DetectorBody(nn.Module):
    """Backbone, pyramid and dense head of a torchvision detector: all that comes before boxes are chosen.

    The features are outputs too, since a detector's second stage reads them.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone: nn.Module = detector.backbone
        two_stage = isinstance(detector, torchvision.models.detection.generalized_rcnn.GeneralizedRCNN)
        self.head = detector.rpn.head if two_stage else detector.head

    def forward(self, images: Tensor) -> tuple[list[Tensor], object]:
        features = list(self.backbone(images).values())
        return features, self.head(features)


def select(patterns: str = "*") -> list[Entry]:
    """The entries whose name contains, or fits as a shell pattern, one of the comma-separated patterns."""
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    return [e for e in ENTRIES if any(fnmatch.fnmatch(e.name, pattern) or pattern in e.name for pattern in wanted)]


def find(name: str) -> Entry:
    """The entry with exactly this name."""
    return next(entry for entry in ENTRIES if entry.name == name)


# name, px, spaces and prunable share in percent (the tracing study, section 10), parameters
_TABLE = """
tv:alexnet                                      96    7  100   61100840
tv:convnext_base                                96   40  100   88591464
tv:convnext_large                               96   40  100  197767336
tv:convnext_small                               96   40  100   50223688
tv:convnext_tiny                                96   22  100   28589128
tv:densenet121                                  96  120  100    7978856
tv:densenet161                                  96  160  100   28681000
tv:densenet169                                  96  168  100   14149480
tv:densenet201                                  96  200  100   20013928
tv:efficientnet_b0                              96   40  100    5288548
tv:efficientnet_b1                              96   53  100    7794184
tv:efficientnet_b2                              96   53  100    9109994
tv:efficientnet_b3                              96   59  100   12233232
tv:efficientnet_b4                              96   71  100   19341616
tv:efficientnet_b5                              96   84  100   30389784
tv:efficientnet_b6                              96   96  100   43040704
tv:efficientnet_b7                              96  115  100   66347960
tv:efficientnet_v2_l                            96  144  100  118515272
tv:efficientnet_v2_m                            96  106  100   54139356
tv:efficientnet_v2_s                            96   75  100   21458488
tv:googlenet                                    96   57  100   13004888
tv:inception_v3                                128   94  100   27161264
tv:maxvit_t                                    224   47   76   30919624
tv:mnasnet0_5                                   96   25  100    2218512
tv:mnasnet0_75                                  96   25  100    3170208
tv:mnasnet1_0                                   96   25  100    4383312
tv:mnasnet1_3                                   96   25  100    6282256
tv:mobilenet_v2                                 96   25  100    3504872
tv:mobilenet_v3_large                           96   30  100    5483032
tv:mobilenet_v3_small                           96   27  100    2542856
tv:regnet_x_16gf                                96   49  100   54278536
tv:regnet_x_1_6gf                               96   39  100    9190136
tv:regnet_x_3_2gf                               96   55  100   15296552
tv:regnet_x_400mf                               96   37  100    5495976
tv:regnet_x_800mf                               96   25  100    7259656
tv:regnet_x_8gf                                 96   51  100   39572648
tv:regnet_y_16gf                                96   59  100   83590140
tv:regnet_y_1_6gf                               96   84  100   11202430
tv:regnet_y_3_2gf                               96   54  100   19436338
tv:regnet_y_400mf                               96   38  100    4344144
tv:regnet_y_800mf                               96   37  100    6432512
tv:regnet_y_8gf                                 96   56  100   39381472
tv:resnet101                                    96   71  100   44549160
tv:resnet152                                    96  105  100   60192808
tv:resnet18                                     96   12  100   11689512
tv:resnet34                                     96   20  100   21797672
tv:resnet50                                     96   37  100   25557032
tv:resnext101_32x8d                             96   41  100   88791336
tv:resnext101_64x4d                             96   38  100   83455272
tv:resnext50_32x4d                              96   21  100   25028904
tv:shufflenet_v2_x0_5                           96   20  100    1366792
tv:shufflenet_v2_x1_0                           96   19   98    2278604
tv:shufflenet_v2_x1_5                           96   20  100    3503624
tv:shufflenet_v2_x2_0                           96   19   98    7393996
tv:squeezenet1_0                                96   25  100    1248424
tv:squeezenet1_1                                96   25  100    1235496
tv:swin_b                                       96   24   54   87768224
tv:swin_s                                       96   24   54   49606258
tv:swin_t                                       96   12   51   28288354
tv:swin_v2_b                                    96   44   48   87930848
tv:swin_v2_s                                    96   44   48   49737442
tv:swin_v2_t                                    96   20   44   28351570
tv:vgg11                                        96   10  100  132863336
tv:vgg11_bn                                     96   10  100  132868840
tv:vgg13                                        96   12  100  133047848
tv:vgg13_bn                                     96   12  100  133053736
tv:vgg16                                        96   15  100  138357544
tv:vgg16_bn                                     96   15  100  138365992
tv:vgg19                                        96   18  100  143667240
tv:vgg19_bn                                     96   18  100  143678248
tv:vit_b_16                                    224   12   93   86567656
tv:vit_b_32                                    224   12   92   88224232
tv:wide_resnet101_2                             96   71  100  126886696
tv:wide_resnet50_2                              96   37  100   68883240
seg:deeplabv3_mobilenet_v3_large                96   37  100   11025477
seg:deeplabv3_resnet101                         96   79  100   58630997
seg:deeplabv3_resnet50                          96   45  100   39638869
seg:fcn_resnet101                               96   73  100   51949141
seg:fcn_resnet50                                96   39  100   32957013
seg:lraspp_mobilenet_v3_large                   96   30  100    3221538
detbody:retinanet_resnet50_fpn                 160   46  100   34068119
detbody:fcos_resnet50_fpn                      160   46  100   32322720
detbody:fasterrcnn_resnet50_fpn                160   39  100   27446351
detbody:fasterrcnn_mobilenet_v3_large_fpn      160   31  100    5048699
detbody:maskrcnn_resnet50_fpn_v2               160   40  100   28038479
detbody:ssd300_vgg16                           300   17   86   35641826
detbody:ssdlite320_mobilenet_v3_large          320   31   66    3440060
timm:resnet10t                                  96   10  100    5435488
timm:resnet18d                                  96   14  100   11708744
timm:resnet26t                                  96   23  100   16011872
timm:resnet50d                                  96   39  100   25576264
timm:resnetaa50                                 96   37  100   25557032
timm:resnetblur50                               96   37  100   25557032
timm:resnetrs50                                 96   56  100   35691912
timm:resnetv2_50                                96   37  100   25549352
timm:resnetv2_50x1_bit                          96   37  100   25549352
timm:res2net50_26w_4s                           96   45  100   25699120
timm:res2next50                                 96   34  100   24671464
timm:resnest14d                                 96   19  100   10611688
timm:resnest50d                                 96   55  100   27483240
timm:seresnet50                                 96   53  100   28088024
timm:skresnet18                                 96   20  100   11958056
timm:ecaresnet26t                               96   19   88   16011916
timm:cspresnet50                                96   42  100   21616168
timm:cspresnext50                               96   26  100   20569896
timm:cspdarknet53                               96   44  100   27642184
timm:darknet53                                  96   29  100   41609928
timm:darknetaa53                                96   29  100   36022984
timm:cs3darknet_m                               96   28  100    9310240
timm:resnext50_32x4d                            96   21  100   25028904
timm:seresnext50_32x4d                          96   37  100   27559896
timm:densenet121                                96  120  100    7978856
timm:densenetblur121d                           96  122  100    7998088
timm:dla34                                      96   25  100   15742104
timm:dla60_res2net                              96   55  100   20848072
timm:dla46x_c                                   96   24  100    1068440
timm:efficientnet_b0                            96   40  100    5288548
timm:efficientnet_lite0                         96   24  100    4652008
timm:tf_efficientnet_b0                         96   40  100    5288548
timm:efficientnetv2_rw_t                        96   73  100   13649388
timm:tf_efficientnetv2_s                        96   75  100   21458488
timm:mixnet_s                                   96   16   28    4134606
timm:tinynet_e                                  96   28  100    2042972
timm:mobilenetv1_100                            96   14  100    4231976
timm:mobilenetv2_100                            96   25  100    3504872
timm:mobilenetv3_small_100                      96   27  100    2542856
timm:mobilenetv3_large_100                      96   30  100    5483032
timm:mobilenetv4_conv_small                     96   21  100    3774024
timm:mobilenetv4_hybrid_medium                  96   30  100   11074648
timm:fbnetc_100                                 96   29  100    5572200
timm:fbnetv3_b                                  96   54  100    8598464
timm:spnasnet_100                               96   29  100    4421616
timm:mnasnet_100                                96   25  100    4383312
timm:hardcorenas_a                              96   27  100    5260232
timm:lcnet_050                                  96   17  100    1880856
timm:semnasnet_100                              96   32  100    3887038
timm:rexnet_100                                 96   32  100    4796873
timm:regnetx_002                                96   20  100    2684792
timm:regnety_004                                96   38  100    4344144
timm:regnetz_b16                                96   53  100    9715480
timm:regnetv_040                                96   71  100   20640640
timm:repvgg_a0                                  96    5  100    9108968
timm:repvgg_b1g4                                96    5  100   39966056
timm:repvit_m1                                  96   41  100    5485248
timm:repghostnet_050                            96   31  100    2313968
timm:ghostnet_100                               96   31  100    5182508
timm:ghostnetv2_100                             96   31  100    6156908
timm:ghostnetv3_100                             96   31  100    8129028
timm:hrnet_w18_small                            96   45  100   13187464
timm:hrnet_w18                                  96  148  100   21299004
timm:selecsls42b                                96   41  100   32458248
timm:vovnet39a                                  96   39  100   22600296
timm:ese_vovnet19b_dw                           96   23  100    6543080
timm:convnext_atto                              96   16  100    3695520
timm:convnext_tiny                              96   22  100   28589128
timm:convnextv2_atto                            96    4  100    3708400
timm:inception_next_tiny                        96   19   95   28055680
timm:nfnet_l0                                   96   57  100   35074488
timm:dm_nfnet_f0                                96   57  100   71489284
timm:nf_resnet50                                96   37  100   25557032
timm:nf_regnet_b0                               96   39  100    8764288
timm:eca_nfnet_l0                               96   41   91   24143924
timm:vgg11                                      96   10  100  132863336
timm:vgg16_bn                                   96   15  100  138365992
timm:inception_v3                               96   94  100   23834568
timm:inception_v4                               96  149  100   42679816
timm:inception_resnet_v2                        96  204  100   55843464
timm:xception41                                 96   33  100   26969560
timm:xception65                                 96   49  100   39916312
timm:legacy_xception                            96   28  100   22855952
timm:hgnet_tiny                                 96   33  100   14735864
timm:hgnetv2_b0                                 96   30  100    5996550
timm:starnet_s1                                 96   20  100    2869168
timm:tresnet_m                                  96   57  100   31389032
timm:mobileone_s0                               96    4  100    5293272
timm:focalnet_tiny_srf                          96   16   91   28427116
timm:edgenext_xx_small                          96   13   81    1327216
timm:fasternet_t0                               96   35  100    3905500
timm:shvit_s1                                   96   23   90    6330808
timm:convmixer_768_32                           96   33  100   21110248
timm:mixer_s32_224                             224   17  100   19104624
timm:resmlp_12_224                             224   13   94   15350872
timm:gmlp_s16_224                              224   31   80   19422656
timm:vit_tiny_patch16_224                      224   25  100    5717416
timm:deit_tiny_patch16_224                     224   25  100    5717416
timm:deit3_small_patch16_224                   224   25  100   22059496
timm:beit_base_patch16_224                     224   12   64   86530984
timm:cait_xxs24_224                            224   50   56   11956264
timm:xcit_nano_12_p16_224                      224   17   65    3053224
timm:swin_tiny_patch4_window7_224              224   35  100   28288354
timm:swinv2_tiny_window8_256                   256   20   78   28347154
timm:twins_svt_small                           224   18   63   24060776
timm:pvt_v2_b0                                  96    8   68    3666760
timm:poolformer_s12                             96   12   87   11915176
timm:poolformerv2_s12                           96   14   96   11891712
timm:caformer_s18                               96   27   75   26341656
timm:maxvit_tiny_rw_224                        224   49   96   29057312
timm:coatnet_nano_rw_224                       224   28   95   15141244
timm:maxxvit_rmlp_nano_rw_256                  256   40   95   16779628
timm:crossvit_tiny_240                         240   30   93    7014800
timm:coat_lite_tiny                            224    8   70    5721960
timm:levit_128s                                224   36   99    7777058
timm:tiny_vit_5m_224                            96   30   90   12082725
timm:efficientvit_b0                            96   17   94    3410008
timm:efficientvit_m0                           224   23   88    2349436
timm:efficientformer_l1                        224   22  100   12289928
timm:efficientformerv2_s0                      224   31   98    3600256
timm:fastvit_t8                                 96   12  100    4026232
timm:mobilevit_xxs                              96   43  100    1272024
timm:mobilevitv2_050                            96   36  100    1370593
timm:halonet26t                                256   20   99   12480288
timm:lambda_resnet26t                           96   17   96   10958272
timm:botnet26t_256                             256   17   87   12488672
timm:lamhalobotnet50ts_256                     256   30   93   22569824
timm:eva02_tiny_patch14_224                    224   12   54    5502144
timm:nextvit_small                              96   49   94   31763368
timm:visformer_tiny                            224   42  100   10321368
timm:tnt_s_patch16_224                         224   67   99   23768584
timm:davit_tiny                                 96   12   55   28360168
timm:hiera_tiny_224                            224   22   89   27910216
timm:mambaout_femto                             96    6   96    7304536
timm:rdnet_tiny                                 96   49  100   23863008
timm:sequencer2d_s                             224   18   83   27651688
timm:volo_d1_224                               224   27   64   26632040
timm:convit_tiny                               224   12   55    5710512
timm:pit_ti_224                                224   25  100    4847272
timm:gcvit_xxtiny                              224   24   58   11995428
timm:nest_tiny                                 224   12   48   17057608
timm:sehalonet33ts                             256   30   97   13691712
timm:hardcorenas_f                              96   41  100    8199688
timm:bat_resnext26ts                           256   45  100   10731200
timm:gernet_s                                   96   28  100    8173761
tv:vit_h_14                                    224   32   95  632045800
tv:regnet_y_128gf                               96   86  100  644812894
tv:vit_l_16                                    224   24   94  304326632
tv:vit_l_32                                    224   24   95  306535400
timm:nasnetalarge                               96  176  100   88753150
timm:pnasnet5large                              96  135  100   86057668
tv:regnet_x_32gf                                96   51  100  107811560
tv:regnet_y_32gf                                96   65  100  145046770
"""

ENTRIES: tuple[Entry, ...] = tuple(
    Entry(name, *map(int, numbers)) for name, *numbers in (line.split() for line in _TABLE.strip().splitlines())
)
