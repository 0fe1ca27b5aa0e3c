# SPDX-License-Identifier: Apache-2.0
# NCCL's host code as a library that runs without a GPU: $(OUT)/libnccl.so, and made-up CUDA next to it. SOURCE: a tree of
# NCCL's sources, of which no file is changed; CUDA: a directory of wheels with CUDA's headers; OUT: where to build.

HERE := $(patsubst %/,%,$(dir $(lastword $(MAKEFILE_LIST))))
SRC := $(SOURCE)/src
include $(SOURCE)/makefiles/version.mk
NUMBER := $(shell printf '%d%02d%02d' $(NCCL_MAJOR) $(NCCL_MINOR) $(NCCL_PATCH))

# As src/Makefile lists them for Linux. NCCL opens NVML by its name: that of the library it is linked with.
FILES := $(shell cd $(SRC) && find . -name '*.cc' ! -path './device/*' ! -path '*/os/windows*' ! -name '*_stub.cc' \
	! -name enhcompat.cc ! -path ./ras/client.cc ! -path ./param/ncclparam.cc -o -path '*/doca-gpunetio/src/*.cpp')
OBJECTS := $(FILES:./%=$(OUT)/objects/%.o)
CUDA_INCLUDE := $(patsubst %,-I%,$(wildcard $(CUDA)/nvidia/*/include))
MADE_UP := $(OUT)/libnvidia-ml.so.1
FLAGS := -std=c++17 -O0 -fPIC -w -pthread -DNCCL_OS_LINUX -DCUDA_MAJOR=12 -DCUDA_MINOR=8 -DPROFAPI -DNCCL_GIN_PROXY_ENABLE=1 \
	-DDOCA_VERBS_USE_CUDA_WRAPPER -DDOCA_VERBS_USE_NET_WRAPPER -I$(OUT)/include -I$(SRC) -I$(SRC)/include \
	-I$(SRC)/include/plugin -I$(wildcard $(SRC)/transport/net_ib/gdaki/doca-gpunetio/include) $(CUDA_INCLUDE)

.DELETE_ON_ERROR:
$(OUT)/libnccl.so: $(OBJECTS) $(OUT)/objects/tables.o $(OUT)/objects/never.o $(OUT)/objects/kernel.o $(MADE_UP)
	$(CXX) -shared -pthread -o $@ $^ -Wl,-rpath,'$$ORIGIN' -Wl,-z,defs -ldl -lrt

$(MADE_UP): $(wildcard $(HERE)/made_up_*)
	$(CXX) -std=c++17 -O1 -fPIC -shared -pthread -Wall $(CUDA_INCLUDE) $(filter %.cpp,$^) -Wl,-soname,$(notdir $@) -o $@

$(OUT)/include/nccl.h: $(SRC)/nccl.h.in
	@mkdir -p $(OUT)/include $(OUT)/generated
	python3 $(SRC)/misc/generate_git_version.py $(OUT)/include/nccl_git_version.h
	sed -e 's/$${nccl:Major}/$(NCCL_MAJOR)/; s/$${nccl:Minor}/$(NCCL_MINOR)/; s/$${nccl:Patch}/$(NCCL_PATCH)/' \
		-e 's/$${nccl:Suffix}//; s/$${nccl:Version}/$(NUMBER)/' $< >$@

# Which kernel does what: sends and receives alone. What it names besides them aborts.
$(OUT)/generated/tables.cc $(OUT)/generated/never.cc &: $(OUT)/include/nccl.h
	python3 $(SRC)/device/generate.py $(OUT)/generated/plain SendRecv
	python3 $(SRC)/device/symmetric/generate.py $(OUT)/generated/symmetric
	cat $(OUT)/generated/plain/host_table.cc $(OUT)/generated/symmetric/sym_kernels_host.cc >$(OUT)/generated/tables.cc
	(echo '#include "sym_kernels.h"'; echo '#include <cstdlib>'; \
	  grep '__global__ void ncclSymk' $(OUT)/generated/symmetric/sym_kernels_host.cc | sed 's/;$$/ { abort(); }/') \
	  >$(OUT)/generated/never.cc

$(OUT)/objects/tables.o $(OUT)/objects/never.o: $(OUT)/objects/%.o: $(OUT)/generated/%.cc
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) -c $< -o $@

$(OUT)/objects/kernel.o: $(HERE)/send_receive_kernel.cpp $(OUT)/include/nccl.h
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) -O1 -Wall -c $< -o $@

$(OBJECTS): $(OUT)/objects/%.o: $(SRC)/% $(OUT)/include/nccl.h
	@mkdir -p $(@D)
	@echo compiling $*
	@$(CXX) $(FLAGS) -c $< -o $@
