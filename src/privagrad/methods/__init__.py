"""The optimizers, one file each."""

from privagrad.methods._base import SCHEDULES, Method, Oracle, Schedule, Setting
from privagrad.methods.adaclip import AdaCliP
from privagrad.methods.adadps import AdaDPS
from privagrad.methods.adagrad import AdaGrad, DPAdaGrad
from privagrad.methods.adam import Adam, DPAdam, DPAdamBC
from privagrad.methods.disk import DiSK
from privagrad.methods.dp2 import DP2
from privagrad.methods.geoclip import GeoClip
from privagrad.methods.gep import GEP
from privagrad.methods.history import HistoryPAGAN
from privagrad.methods.mirror_descent import MirrorDescent
from privagrad.methods.objective_perturbation import ObjectivePerturbation
from privagrad.methods.output_perturbation import OutputPerturbation
from privagrad.methods.pagan import PAGAN
from privagrad.methods.pasan import PASAN
from privagrad.methods.pdp_sgd import PDPSGD
from privagrad.methods.scale_then_privatize import ScaleThenPrivatize
from privagrad.methods.sgd import DPSGD, SGD
from privagrad.methods.subspace_adagrad import SubspaceAdaGrad

__all__ = ["METHODS", "SCHEDULES", "Method", "Oracle", "Schedule", "Setting"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        SGD(),
        AdaGrad(),
        DPSGD(),
        DPAdaGrad(),
        PASAN(),
        PAGAN(),
        HistoryPAGAN(),
        PDPSGD(),
        AdaCliP(),
        GeoClip(),
        GEP(),
        SubspaceAdaGrad(),
        MirrorDescent(),
        OutputPerturbation(),
        ObjectivePerturbation(),
        Adam(),
        DPAdam(),
        DPAdamBC(),
        ScaleThenPrivatize(),
        AdaDPS(),
        DP2(),
        DiSK(),
    )
}
