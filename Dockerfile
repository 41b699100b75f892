# nwor-bench for a GPU, in vLLM's own image:
#
#     docker build -t nwor-bench .
#     docker run --rm --gpus all --ipc=host -v "$PWD/runs:/work/runs" nwor-bench sweep
FROM vllm/vllm-openai:v0.33.0

# Packages of the image are constraints, so that pip only adds what is missing: vLLM and PyTorch
# stay as they are. Ubuntu's Python wants to be told that packages may be added to it.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY . /src
RUN python3 -m pip list --format=freeze > /tmp/installed.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/installed.txt /src \
    && rm -r /src /tmp/installed.txt

WORKDIR /work
ENTRYPOINT ["nwor-bench"]
CMD ["doctor"]
