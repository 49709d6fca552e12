import torch
def attention_stats(o,g,lse,glse):
    B,H,T=lse.shape; P=-(-T//64)*64
    st=torch.zeros(B,H,2,P,device=o.device); st[:,:,0]=float("inf")
    l=lse*1.4426950408889634; st[:,:,0,:T]=l.masked_fill(l==float("-inf"),float("inf"))
    d=(o.float()*g.float()).sum(-1)
    if glse is not None: d=d-glse
    st[:,:,1,:T]=d
    return st
